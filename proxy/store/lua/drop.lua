-- Remove the copy and leave a tombstone; answer {1, time} if there was one.
-- Arguments: reason, token that an open copy must have ('' for any), only if it had ended by then
-- ('' for always).
local token, ended_by = ARGV[6], tonumber(ARGV[7])
if ended_by then  -- also one whose other keys the server has removed by itself
    local ended_at = redis.call('ZSCORE', ENDED, member)
    if not ended_at or tonumber(ended_at) > ended_by then
        return {0}
    end
else
    local found = find()
    if not found or (token ~= '' and not found.ended_at and found.token ~= token) then
        return {0}
    end
end
remove(ARGV[5])
return {1, string.format('%.6f', now)}
