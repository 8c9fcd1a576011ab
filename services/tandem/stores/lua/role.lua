-- Set the role of one incarnation of a worker.
-- KEYS[1] hash: worker id -> incarnation as 20 decimal digits, then the record
-- KEYS[2] sorted set: worker id -> when its entry lapses, in milliseconds of this server's clock
-- KEYS[3] version, see publish
-- KEYS[4] hash: worker id -> incarnation and role, see publish
-- ARGV    worker id, incarnation (20 digits), role
-- Returns 1, or 0 if that incarnation is not registered.
local id, incarnation = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local held, lapses = redis.call('HGET', KEYS[1], id), redis.call('ZSCORE', KEYS[2], id)
if not held or string.sub(held, 1, 20) ~= incarnation then
  return 0
end
if not lapses or tonumber(lapses) <= time[1] * 1000 + math.floor(time[2] / 1000) then
  return 0
end
if redis.call('HGET', KEYS[4], id) ~= incarnation .. ARGV[3] then
  redis.call('HSET', KEYS[4], id, incarnation .. ARGV[3])
  local ttl = redis.call('PTTL', KEYS[1])
  if ttl > 0 then
    redis.call('PEXPIRE', KEYS[4], ttl)
  end
  local version = math.max(time[1] * 1000000 + time[2], (tonumber(redis.call('GET', KEYS[3])) or 0) + 1)
  redis.call('SET', KEYS[3], string.format('%.0f', version), 'KEEPTTL')
end
return 1
