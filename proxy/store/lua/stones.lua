-- Forget some tombstones that are old enough; answer how many.  Argument: seconds that they stay.
local old = redis.call('ZRANGEBYSCORE', STONE_AGES, '-inf', string.format('%.6f', now - ARGV[5]), 'LIMIT', 0, 256)
for _, stone in ipairs(old) do
    forget_stone(stone)
end
return {#old}
