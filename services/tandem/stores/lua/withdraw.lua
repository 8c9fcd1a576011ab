-- Remove one incarnation of a worker from the registry; the entry of another incarnation stays.
-- KEYS[1] hash: worker id -> incarnation as 20 decimal digits, then the record
-- KEYS[2] sorted set: worker id -> when its entry lapses
-- KEYS[3] version, see publish; absent if there is no record
-- KEYS[4] hash: worker id -> incarnation and role, see publish
-- ARGV    worker id, incarnation (20 digits)
-- Returns 1, or 0 if that incarnation was not registered.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held or string.sub(held, 1, 20) ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 1 then
  local time = redis.call('TIME')
  local version = math.max(time[1] * 1000000 + time[2], (tonumber(redis.call('GET', KEYS[3])) or 0) + 1)
  redis.call('SET', KEYS[3], string.format('%.0f', version), 'KEEPTTL')
else
  redis.call('DEL', KEYS[3])
end
return 1
