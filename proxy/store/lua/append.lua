-- Add rows behind the `after` blocks that the copy must hold, for the one who holds its lease.
-- Arguments: token, batch, after, bytes, snapshot is given ('1'), snapshot, max_copy, max_store,
-- then for each row: how many blocks, the last one's number, the data.
local token, batch, after = ARGV[5], ARGV[6], tonumber(ARGV[7])
local found = find()
if not found then
    return {'absent'}
elseif found.ended_at and (token == '-' or token == found.token) then
    return {'ended'}
elseif found.token ~= token then
    return {'taken'}
elseif found.batch == batch then  -- sent a second time, since the first answer was lost
    return {'done'}
elseif found.blocks ~= after then
    return {'misplaced', string.format('%.0f', found.blocks)}
end
local added = tonumber(ARGV[8])
local with_snapshot = ARGV[9] == '1'
if with_snapshot then
    added = added + #ARGV[10] - redis.call('HSTRLEN', COPY, 'snapshot')
end
local full = no_room(tonumber(redis.call('HGET', SIZES, member) or 0), added, tonumber(ARGV[11]), tonumber(ARGV[12]))
if full then
    if full[1] ~= 'evict' then
        remove('dropped')
    end
    return full
end
local blocks, rows, last_number = found.blocks, found.rows, found.last_number
for place = 13, #ARGV, 3 do
    last_number = ARGV[place + 1]
    redis.call('XADD', EVENTS, string.format('%.0f-%.0f', blocks + 1, last_number + 1), 'd', ARGV[place + 2])
    blocks = blocks + ARGV[place]
    rows = rows + 1
end
redis.call('HSET', COPY, 'blocks', string.format('%.0f', blocks), 'rows', rows,
    'last_number', last_number, 'batch', batch)
if with_snapshot then
    redis.call('HSET', COPY, 'snapshot', ARGV[10])
end
grow(added)
return {'done'}
