-- Store the demand record of one gateway, or delete it. Records older than the time to live are deleted first.
-- KEYS[1] hash: gateway -> its record, in a form that only gateways and planners read
-- KEYS[2] sorted set: gateway -> when it was stored, in milliseconds of this server's clock
-- ARGV    gateway, its record (empty: delete it), time to live in milliseconds
-- Returns nothing.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[3])) do
  redis.call('HDEL', KEYS[1], gateway)
  redis.call('ZREM', KEYS[2], gateway)
end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  return
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
for i = 1, 2 do
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
end
