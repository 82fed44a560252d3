-- Ask whoever makes the response to cancel it; answer 1 if it is still made.
local found = find()
if not found or found.ended_at then
    return {0}
end
redis.call('HSET', COPY, 'cancel', '1')
tell('cancel')
return {1}
