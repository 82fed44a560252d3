-- Find the row with the first block whose number is greater than `number`.
-- Answer: {index of its first block, row}, {block count} if there is none, {} without a copy.
local number = tonumber(ARGV[5])
local found = find()
if not found then
    return {}
elseif number >= tonumber(found.last_number) then
    return {string.format('%.0f', found.blocks)}
end
local low, high = 1, found.blocks
while low < high do
    local middle = math.floor((low + high) / 2)
    local row = row_at(middle)
    if row[2] > number then
        high = row[1] + 1
    else
        low = middle + 1
    end
end
local row = row_at(low)
return {string.format('%.0f', row[1]), row[3]}
