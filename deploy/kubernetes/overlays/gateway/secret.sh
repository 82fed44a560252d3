#!/bin/sh
# Prints a Secret with new random values: sh secret.sh | kubectl create -f -
# Make it once: with another owner secret, nobody gets at the copies that are kept.
# If you have a Redis, put its address in place of lastword-redis.
set -eu

random() {
    LC_ALL=C tr -dc '0-9a-f' </dev/urandom | head -c 64
}

password=$(random)
cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: lastword
stringData:
  LASTWORD_STORE: redis://:$password@lastword-redis:6379/0
  LASTWORD_OWNER_SECRET: $(random)
  redis.conf: requirepass $password
END
