-- Register a gateway or remove it, and count the registered gateways.
-- KEYS[1] sorted set: gateway id -> when its entry lapses, in milliseconds of this server's clock
-- ARGV    gateway id, time to live in milliseconds (0: remove it)
-- Returns the number of gateways.
local ttl = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if ttl > 0 then
  redis.call('ZADD', KEYS[1], now + ttl, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ttl)
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return redis.call('ZCARD', KEYS[1])
