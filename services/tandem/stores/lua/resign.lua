-- Give up leadership for a model's target, so that the next planner that publishes gets it; the target itself stays.
-- KEYS[1] the planner that is the leader
-- ARGV    planner
-- Returns 1, or 0 if the caller was not the leader.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
