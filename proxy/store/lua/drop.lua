-- Remove the copy and leave a tombstone; answer {1, time} if there was one.
-- Arguments: reason, its writer's token ('' for whoever, '-' for none: then only an ended copy goes),
-- only if it had ended by then ('' for always).
local token, ended_by = ARGV[6], tonumber(ARGV[7])
if ended_by then  -- also one whose other keys the server has removed by itself
    local ended_at = redis.call('ZSCORE', ENDED, member)
    if not ended_at or tonumber(ended_at) > ended_by then
        return {0}
    end
else
    local found = find()
    if not found or (token ~= '' and found.token ~= token and not (token == '-' and found.ended_at)) then
        return {0}
    end
end
remove(ARGV[5])
return {1, string.format('%.6f', now)}
