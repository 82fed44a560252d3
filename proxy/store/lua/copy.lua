-- What every script on one copy begins with: its keys, its time, and what several scripts do.
--
-- A copy is a hash (COPY) and a stream (EVENTS) of rows.  A row holds some blocks, and its id is
-- <index of its first block + 1>-<number of its last block + 1>, so both an index and a number
-- lead to it, and no row is ever added twice.  The hash tells how many rows there must be: a
-- stream that has fewer was trimmed or evicted by someone else, and the copy is gone.
local COPY, EVENTS, CLAIM, OPEN, ENDED, SIZES, TOTALS, STONES, STONE_AGES, IDS, NEWS = unpack(KEYS)
local member, response_id, max_stones = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now = tonumber(ARGV[4])
if not now then  -- the server's clock: the replicas' own may differ
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end

local function tell(kind, extra)
    redis.call('XADD', NEWS, 'MAXLEN', '~', 4096, '*', 'kind', kind, 'copy', member, 'extra', extra or '')
end

local function forget_stone(stone)
    redis.call('HDEL', STONES, stone)
    redis.call('ZREM', STONE_AGES, stone)
    local id = string.match(stone, '^[^:]*:(.*)$')
    if redis.call('HINCRBY', IDS, id, -1) <= 0 then
        redis.call('HDEL', IDS, id)
    end
end

-- Remove the copy, whatever is left of it, and leave a tombstone.  Deletions come first: a server
-- that is out of memory refuses no write behind one.
local function remove(reason)
    redis.call('UNLINK', COPY, EVENTS)
    redis.call('ZREM', OPEN, member)
    local ended = redis.call('ZREM', ENDED, member) == 1
    local size = tonumber(redis.call('HGET', SIZES, member) or 0)
    redis.call('HDEL', SIZES, member)
    redis.call('HINCRBY', TOTALS, 'size', 0 - size)  -- and not -0, which is no integer
    if ended then
        redis.call('HINCRBY', TOTALS, 'ended', 0 - size)
    end
    redis.call('HSET', STONES, member, reason .. ':' .. string.format('%.6f', now))
    redis.call('ZADD', STONE_AGES, now, member)
    local beyond = redis.call('ZCARD', STONE_AGES) - max_stones
    if beyond > 0 then
        for _, stone in ipairs(redis.call('ZRANGE', STONE_AGES, 0, math.min(beyond, 64) - 1)) do
            forget_stone(stone)
        end
    end
    tell('gone', reason)
end

-- The copy as it is, or nil.  One of which others removed a part is gone as a whole.
local function find()
    local found = redis.call('HMGET', COPY, 'token', 'blocks', 'rows', 'last_number', 'ended_at', 'batch', 'gen')
    if found[1] then
        local rows = tonumber(found[3])
        if redis.call('XLEN', EVENTS) == rows then
            return {
                token = found[1], blocks = tonumber(found[2]), rows = rows, last_number = found[4],
                ended_at = found[5] ~= '' and found[5] or nil, batch = found[6], gen = found[7],
            }
        end
    end
    if found[1] or redis.call('ZSCORE', OPEN, member) or redis.call('ZSCORE', ENDED, member) then
        remove('evicted')
    end
    return nil
end

local function info()
    local told = redis.call('HMGET', COPY, 'meta', 'snapshot', 'created_at', 'ended_at', 'last_number', 'blocks')
    told[7] = redis.call('HGET', SIZES, member) or '0'
    return told
end

-- Whether `added` bytes fit: nil if so, or the answer that says what to do first.
local function no_room(held, added, max_copy, max_store)
    if held + added > max_copy then
        return {'copy_full', string.format('%.0f', held + added)}
    end
    local totals = redis.call('HMGET', TOTALS, 'size', 'ended')
    local size, ended = tonumber(totals[1] or 0), tonumber(totals[2] or 0)
    local missing = size + added - max_store
    if missing <= 0 then
        return nil
    end
    local answer = {'evict'}
    if missing <= ended then
        for _, oldest in ipairs(redis.call('ZRANGE', ENDED, 0, 63)) do
            if missing > 0 then
                missing = missing - tonumber(redis.call('HGET', SIZES, oldest) or 0)
                answer[#answer + 1] = oldest
            end
        end
    end
    if #answer > 1 then
        return answer
    end
    return {'store_full', string.format('%.0f', size + added)}
end

local function grow(added)
    redis.call('HINCRBY', SIZES, member, added)
    redis.call('HINCRBY', TOTALS, 'size', added)
end

-- The row that holds the block before the place `upto`: {first index, last number, data}.
local function row_at(upto)
    local row = redis.call('XREVRANGE', EVENTS, string.format('%.0f', upto), '-', 'COUNT', 1)[1]
    local first, number = string.match(row[1], '^(%d+)-(%d+)$')
    return {tonumber(first) - 1, tonumber(number) - 1, row[2][2]}
end
