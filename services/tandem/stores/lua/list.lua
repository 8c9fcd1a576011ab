-- Delete lapsed entries and return the records of the others, unless the caller has them already.
-- KEYS[1] hash: worker id -> incarnation as 20 decimal digits, then the record
-- KEYS[2] sorted set: worker id -> when its entry lapses, in milliseconds of this server's clock
-- KEYS[3] version, see publish; absent if there is no record
-- KEYS[4] hash: worker id -> incarnation and role, see publish
-- ARGV    the version that the caller has, or empty
-- Returns the version, empty if there is no record; and if it differs from the caller's, a list of the records in no
-- particular order, and a list of worker ids and roles by turns.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
for _, id in ipairs(lapsed) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[4], id)
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[3])
elseif #lapsed > 0 then
  local version = math.max(time[1] * 1000000 + time[2], (tonumber(redis.call('GET', KEYS[3])) or 0) + 1)
  redis.call('SET', KEYS[3], string.format('%.0f', version), 'KEEPTTL')
end
local version = redis.call('GET', KEYS[3]) or ''
if version ~= '' and version == ARGV[1] then
  return {version}
end
local records = {}
for _, held in ipairs(redis.call('HVALS', KEYS[1])) do
  records[#records + 1] = string.sub(held, 21)
end
return {version, records, redis.call('HGETALL', KEYS[4])}
