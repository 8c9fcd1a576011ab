-- Hear what all gateways have said of demand, and how long ago.
-- KEYS[1] hash: gateway -> its word, see demand
-- KEYS[2] sorted set: gateway -> when it said so, in milliseconds of this server's clock
-- ARGV    milliseconds after which a word counts no more
-- Returns gateway, its word, and its age in milliseconds by turns, in no particular order.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local told = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. (now - ARGV[1]), '+inf', 'WITHSCORES')
local found = {}
for i = 1, #told, 2 do
  local word = redis.call('HGET', KEYS[1], told[i])
  if word then
    found[#found + 1] = told[i]
    found[#found + 1] = word
    found[#found + 1] = now - told[i + 1]
  end
end
return found
