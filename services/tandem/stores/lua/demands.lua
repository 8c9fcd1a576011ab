-- Return the demand records of all gateways with their ages.
-- KEYS[1] hash: gateway -> its record, see demand
-- KEYS[2] sorted set: gateway -> when it was stored, in milliseconds of this server's clock
-- ARGV    maximum age of a record in milliseconds
-- Returns gateway, its record, and its age in milliseconds by turns, in no particular order.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fresh = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. (now - ARGV[1]), '+inf', 'WITHSCORES')
local found = {}
for i = 1, #fresh, 2 do
  local record = redis.call('HGET', KEYS[1], fresh[i])
  if record then
    found[#found + 1] = fresh[i]
    found[#found + 1] = record
    found[#found + 1] = now - fresh[i + 1]
  end
end
return found
