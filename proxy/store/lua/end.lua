-- Mark the copy as ended.  Arguments: token, snapshot is given ('1'), snapshot, max_copy,
-- max_store, milliseconds that the keys live on.
local token = ARGV[5]
local found = find()
if not found then
    return {'absent'}
elseif found.ended_at then
    return {'done'}
elseif found.token ~= token then
    return {'taken'}
end
if ARGV[6] == '1' then
    local added = #ARGV[7] - redis.call('HSTRLEN', COPY, 'snapshot')
    local held = tonumber(redis.call('HGET', SIZES, member) or 0)
    local full = no_room(held, added, tonumber(ARGV[8]), tonumber(ARGV[9]))
    if full then
        if full[1] ~= 'evict' then
            remove('dropped')
        end
        return full
    end
    redis.call('HSET', COPY, 'snapshot', ARGV[7])
    grow(added)
end
redis.call('HSET', COPY, 'ended_at', string.format('%.6f', now))
redis.call('ZREM', OPEN, member)
redis.call('ZADD', ENDED, now, member)
redis.call('HINCRBY', TOTALS, 'ended', redis.call('HGET', SIZES, member) or 0)
-- Should no proxy be left to remove them, the server does.
redis.call('PEXPIRE', COPY, ARGV[10])
redis.call('PEXPIRE', EVENTS, ARGV[10])
tell('ended', string.format('%.0f', found.blocks))
return {'done'}
