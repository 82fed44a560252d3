-- Give the lease of an open copy back, so that another may take it at once.  Argument: token.
local found = find()
if not found or found.ended_at or found.token ~= ARGV[5] then
    return {0}
end
redis.call('HSET', COPY, 'token', '')
redis.call('ZADD', OPEN, 0, member)
tell('free')
return {1}
