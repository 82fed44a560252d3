-- Tell what is known of a key: {'copy', ...}, {'stone', reason:time} or {}.
if find() then
    return {'copy', info()}
end
local stone = redis.call('HGET', STONES, member)
if stone then
    return {'stone', stone}
end
return {}
