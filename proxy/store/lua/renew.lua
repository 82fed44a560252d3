-- Renew leases and claims; answer with the places (from 1) of leases that someone else has taken.
-- A copy that is gone is for its writer's next append to find.
-- Keys: the open copies' set, then for each lease its copy's hash or its claim.
-- Arguments: now, lease, its milliseconds, then for each lease: member ('' for a claim), token.
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end
local lost = {}
for place = 2, #KEYS do
    local member, token = ARGV[place * 2], ARGV[place * 2 + 1]
    if member == '' then
        local claim = redis.call('GET', KEYS[place])
        if claim and string.sub(claim, 1, #token + 1) == token .. '|' then
            redis.call('PEXPIRE', KEYS[place], ARGV[3])
        end
    else
        local holder = redis.call('HGET', KEYS[place], 'token')
        if holder == token then
            redis.call('ZADD', KEYS[1], 'XX', now + ARGV[2], member)
        elseif holder then
            lost[#lost + 1] = place - 1
        end
    end
end
return lost
