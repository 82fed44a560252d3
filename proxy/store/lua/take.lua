-- Take the lease of an open copy that has run out.  Arguments: token, lease.
-- Answer: {info, whether it was asked to be cancelled}, or {}.
local token = ARGV[5]
local found = find()
if not found or found.ended_at then
    return {}
end
local held_until = tonumber(redis.call('ZSCORE', OPEN, member) or 0)
if held_until > now and found.token ~= token then
    return {}
end
redis.call('HSET', COPY, 'token', token, 'batch', '')
redis.call('ZADD', OPEN, now + ARGV[6], member)
return {info(), redis.call('HGET', COPY, 'cancel') or ''}
