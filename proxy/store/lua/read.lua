-- Read rows from the one that holds the block `start`, as long as they are `bytes` together, but
-- at least one.  Arguments: gen, start, bytes.  An empty gen asks for the copy as it is now.
-- Answer: {gen, blocks, index of the first row's first block, row, row, ...}, or {}.
local gen, start, bytes = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local found = find()
if not found or (gen ~= '' and gen ~= found.gen) then
    return {}
end
local answer = {found.gen, string.format('%.0f', found.blocks)}
if start >= found.blocks then
    return answer
end
local first = redis.call('XREVRANGE', EVENTS, string.format('%.0f', start + 1), '-', 'COUNT', 1)[1]
answer[3] = string.format('%.0f', tonumber(string.match(first[1], '^%d+')) - 1)
local from, size, count = first[1], 0, 8
while true do
    local rows = redis.call('XRANGE', EVENTS, from, '+', 'COUNT', count)
    for _, row in ipairs(rows) do
        local data = row[2][2]
        if #answer > 3 and size + #data > bytes then
            return answer
        end
        size = size + #data
        answer[#answer + 1] = data
    end
    if #rows < count then
        return answer
    end
    from = '(' .. rows[#rows][1]
    count = math.min(count * 2, 256)
end
