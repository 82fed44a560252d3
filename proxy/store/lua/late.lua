-- List some of a sorted set's members whose time is over: {time that counts as over, member, ...}.
-- Keys: the set.  Arguments: now, seconds that it may be past.
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end
local over = string.format('%.6f', now - ARGV[2])
local answer = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', over, 'LIMIT', 0, 256)
table.insert(answer, 1, over)
return answer
