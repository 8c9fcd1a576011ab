-- Store how many workers of a role one Serve intends to run, unless ARGV[1] is empty; return the numbers of all Serves.
-- KEYS[1] hash: role and Serve -> its number
-- KEYS[2] sorted set: role and Serve -> when that lapses, in milliseconds of this server's clock
-- ARGV    role and Serve (empty: only read), its number, time to live in milliseconds
-- Returns role and Serve, and its number by turns, in no particular order.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], lapsed)
  redis.call('ZREM', KEYS[2], lapsed)
end
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
  for i = 1, 2 do
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  end
end
return redis.call('HGETALL', KEYS[1])
