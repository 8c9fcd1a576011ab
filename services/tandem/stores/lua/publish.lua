-- Register one incarnation of a worker or renew its entry, unless a later incarnation is registered.
-- KEYS[1] hash: worker id -> incarnation as 20 decimal digits, then the record
-- KEYS[2] sorted set: worker id -> when its entry lapses, in milliseconds of this server's clock
-- KEYS[3] version: changes with each change of the records, also across restarts of this server and a failover to a
--         replica that lacks the last changes: the server's clock in microseconds, or the last version plus one
-- KEYS[4] hash: worker id -> incarnation as 20 decimal digits, then the role that was set for that incarnation
-- ARGV    worker id, incarnation (20 digits, so that text compares as numbers do: Lua's doubles are too short),
--         record, time to live in milliseconds, the last role that this incarnation received, empty if none: it is
--         used if this incarnation has no entry, since its role was then lost together with the entry
-- Returns 1 and the role, empty if none is set; or 0 if a later incarnation holds the id.
local id, incarnation, record, ttl = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lapses = redis.call('ZSCORE', KEYS[2], id)
local held = redis.call('HGET', KEYS[1], id)
if held and lapses and tonumber(lapses) > now and string.sub(held, 1, 20) > incarnation then
  return {0, ''}
end
local role = redis.call('HGET', KEYS[4], id)
role = role and string.sub(role, 1, 20) == incarnation and string.sub(role, 21) or ''
if not held or string.sub(held, 1, 20) ~= incarnation then
  role = role ~= '' and role or ARGV[5]
  if role == '' then
    redis.call('HDEL', KEYS[4], id)
  else
    redis.call('HSET', KEYS[4], id, incarnation .. role)
  end
end
if held ~= incarnation .. record then
  redis.call('HSET', KEYS[1], id, incarnation .. record)
  local version = math.max(time[1] * 1000000 + time[2], (tonumber(redis.call('GET', KEYS[3])) or 0) + 1)
  redis.call('SET', KEYS[3], string.format('%.0f', version), 'KEEPTTL')
end
redis.call('ZADD', KEYS[2], now + ttl, id)
-- Let all keys expire when there are no workers and nobody calls list.
for i = 1, 4 do
  if redis.call('PTTL', KEYS[i]) < ttl then
    redis.call('PEXPIRE', KEYS[i], ttl)
  end
end
return {1, role}
