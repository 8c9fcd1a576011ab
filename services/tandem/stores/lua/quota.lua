-- Reserve, renew or settle quota of one tenant, exactly as TenantQuota in admission/quota.py does.
-- KEYS[1] hash: requests, tokens: levels of the buckets in 1/60,000, empty without a limit; at: their time, in
--         milliseconds
-- KEYS[2] hash: id of an open reservation -> requests, tokens charged, tokens used
-- KEYS[3] sorted set: id of an open reservation -> when it expires, in milliseconds of this server's clock
-- ARGV    verb, requests per minute, tokens per minute, concurrency (0: no limit), time to live of a reservation in
--         milliseconds, the time in milliseconds (empty: this server's clock; only tests pass a time);
--         reserve: id, requests, tokens, 1 to take them even if too little is left
--         renew: id, tokens used, and so on
--         settle: id, tokens used (empty: refund everything)
-- Returns both levels, then; reserve: the limit that refuses it or empty, and milliseconds to wait; renew: the ids that
-- are not open; settle: 1, or 0 if the reservation is not open.
local UNIT, MAX_SWEEP, MAX_BACK = 60000, 256, 60000
local verb, max_open, ttl, now = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local at = tonumber(held[3] or now)
if now < at - MAX_BACK then
  at = now
  local latest = string.format('%.0f', now + ttl)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. latest, '+inf')) do
    redis.call('ZADD', KEYS[3], latest, id)
  end
end
now = math.max(now, at)

local limits, levels = {tonumber(ARGV[2]), tonumber(ARGV[3])}, {}
local function give(i, amount)
  if limits[i] > 0 then
    levels[i] = math.min(limits[i] * UNIT, levels[i] + amount * UNIT)
  end
end
for i, limit in ipairs(limits) do
  local level = tonumber(held[i] or '')
  levels[i] = limit * UNIT
  if level and limit > 0 then
    levels[i] = math.min(limit * UNIT, level + limit * (now - at))
  end
end

local function record(id)
  local text = redis.call('HGET', KEYS[2], id)
  if text then
    local requests, charged, used = string.match(text, '(%d+) (%d+) (%d+)')
    return tonumber(requests), tonumber(charged), tonumber(used)
  end
end
local function keep(id, requests, charged, used)
  redis.call('HSET', KEYS[2], id, string.format('%.0f %.0f %.0f', requests, charged, used))
  redis.call('ZADD', KEYS[3], string.format('%.0f', now + ttl), id)
end
local function close(id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, MAX_SWEEP)) do
  local _, charged, used = record(id)
  close(id)
  give(2, (charged or 0) - (used or 0))
end

local function lacks(requests, tokens)
  local name, longest = '', 0
  local needed, names = {requests, tokens}, {'requests_per_minute', 'tokens_per_minute'}
  for i, limit in ipairs(limits) do
    local wait = limit > 0 and math.ceil((needed[i] * UNIT - levels[i]) / limit) or 0
    if wait > longest then
      name, longest = names[i], wait
    end
  end
  if longest == 0 and max_open > 0 and redis.call('HLEN', KEYS[2]) >= max_open then
    name = 'concurrency'
  end
  return name, longest
end

local answer = {}
if verb == 'reserve' then
  local id, requests, tokens = ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
  local name, wait = '', 0
  if not record(id) then
    if ARGV[10] ~= '1' then
      name, wait = lacks(requests, tokens)
    end
    if name == '' then
      give(1, -requests)
      give(2, -tokens)
      keep(id, requests, tokens, 0)
    end
  end
  answer = {name, wait}
elseif verb == 'renew' then
  for i = 7, #ARGV, 2 do
    local requests, charged, used = record(ARGV[i])
    if requests then
      used = math.max(used, tonumber(ARGV[i + 1]))
      give(2, math.min(0, charged - used))
      keep(ARGV[i], requests, math.max(charged, used), used)
    else
      answer[#answer + 1] = ARGV[i]
    end
  end
else
  local requests, charged = record(ARGV[7])
  if requests then
    close(ARGV[7])
    give(1, ARGV[8] == '' and requests or 0)
    give(2, charged - (tonumber(ARGV[8]) or 0))
  end
  answer = {requests and 1 or 0}
end

-- Let the keys expire when no reservation is open and all buckets are full: absent keys mean the same.
local lives, texts = 2 * ttl, {}
for i, limit in ipairs(limits) do
  texts[i] = limit > 0 and string.format('%.0f', levels[i]) or ''
  lives = limit > 0 and math.max(lives, math.ceil((limit * UNIT - levels[i]) / limit)) or lives
end
redis.call('HSET', KEYS[1], 'requests', texts[1], 'tokens', texts[2], 'at', string.format('%.0f', now))
for i = 1, 3 do
  redis.call('PEXPIRE', KEYS[i], string.format('%.0f', lives))
end
return {levels[1], levels[2], unpack(answer)}
