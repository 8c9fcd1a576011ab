-- Drop what has lapsed and give the records of the rest.
-- KEYS[1] hash: worker id -> incarnation as 20 decimal digits, then the record
-- KEYS[2] sorted set: worker id -> when its entry lapses, in milliseconds of this server's clock
-- Returns the records, in no particular order.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
local records = {}
for _, held in ipairs(redis.call('HVALS', KEYS[1])) do
  records[#records + 1] = string.sub(held, 21)
end
return records
