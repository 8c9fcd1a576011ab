-- Store the totals that one gateway has served, and return those of all gateways.
-- KEYS[1] hash: gateway -> its totals, in a form that only gateways read
-- KEYS[2] sorted set: gateway -> when its totals lapse, in milliseconds of this server's clock
-- ARGV    gateway, its totals, time to live in milliseconds
-- Returns gateways and totals by turns, the caller's own among them, in no particular order.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], gateway)
  redis.call('ZREM', KEYS[2], gateway)
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
for i = 1, 2 do
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
end
return redis.call('HGETALL', KEYS[1])
