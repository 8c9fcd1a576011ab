-- Leave the right to say a model's target to whoever asks next; the target itself stays.
-- KEYS[1] the planner whose word counts
-- ARGV    planner
-- Returns 1, or 0 where it was not the caller's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
