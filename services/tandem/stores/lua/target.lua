-- Publish how many workers of a model there should be, unless another planner is the leader.
-- KEYS[1] the target, in a form that only planners and their readers know
-- KEYS[2] the planner that is the leader
-- ARGV    planner, target, time to live of the target, and of the planner's leadership, in milliseconds
-- Returns the leader: the caller if its target was stored.
local held = redis.call('GET', KEYS[2])
if held and held ~= ARGV[1] then
  return held
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[1]
