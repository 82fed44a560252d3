-- Tell how far a copy is, without its content: {blocks, '1' if it has ended}, or {} if it is gone.
local found = find()
if not found then
    return {}
end
return {string.format('%.0f', found.blocks), found.ended_at and '1' or ''}
