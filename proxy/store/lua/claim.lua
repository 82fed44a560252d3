-- Claim a key before its copy is made.  Arguments: token, digest, milliseconds.
-- Answer: {'mine'}, {'copy'} if there is one already, {'claimed', digest} if another was first.
local token, digest = ARGV[5], ARGV[6]
if find() then
    return {'copy'}
end
local claim = redis.call('GET', CLAIM)
if claim and claim ~= token .. '|' .. digest then
    return {'claimed', string.match(claim, '|(.*)$')}
end
redis.call('SET', CLAIM, token .. '|' .. digest, 'PX', ARGV[7])
return {'mine'}
