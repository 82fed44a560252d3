-- Let go of claims.  Keys: the claims; arguments: their tokens.
for place, key in ipairs(KEYS) do
    local claim = redis.call('GET', key)
    if claim and string.sub(claim, 1, #ARGV[place] + 1) == ARGV[place] .. '|' then
        redis.call('DEL', key)
    end
end
return {}
