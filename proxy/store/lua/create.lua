-- Make an open copy, unless there is one.  Arguments: token, meta, snapshot, lease, max_copy, max_store.
local token, meta, snapshot = ARGV[5], ARGV[6], ARGV[7]
local found = find()
if found then
    if found.token == token then  -- sent a second time, since the first answer was lost
        return {'made'}
    end
    return {'there', info()}
end
local full = no_room(0, #meta + #snapshot, tonumber(ARGV[9]), tonumber(ARGV[10]))
if full then
    return full
end
-- The first write is one that a server without memory refuses: behind another it would pass.
redis.call('HSET', COPY, 'token', token, 'gen', token, 'meta', meta, 'snapshot', snapshot,
    'created_at', string.format('%.6f', now), 'ended_at', '', 'blocks', 0, 'rows', 0,
    'last_number', -1, 'batch', '')
redis.call('UNLINK', EVENTS)
redis.call('ZADD', OPEN, now + ARGV[8], member)
grow(#meta + #snapshot)
if redis.call('HDEL', STONES, member) == 1 then
    redis.call('ZREM', STONE_AGES, member)
else
    redis.call('HINCRBY', IDS, response_id, 1)
end
redis.call('DEL', CLAIM)
return {'made'}
