"""What runs inside Redis? The two scripts of the store: one reads records, one compares and writes them.

Each runs as a whole or not at all, and answers with Redis' time, which every transition is judged by.
"""

from __future__ import annotations

__all__ = ["COMMIT", "LOAD"]

# Microseconds of Redis' clock. A small step back, as of a corrected clock, is waited out: what was lost stays lost.
_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
if last > now and last - now < 60000000 then now = last end
local micros = string.format('%.0f', now)
"""

# KEYS: clock, then the keys to read.
LOAD = (
    _CLOCK
    + """
local out = {micros}
for i = 2, #KEYS do
  local row = redis.call('HMGET', KEYS[i], 'r', 'v')
  out[#out + 1] = row[1] or '0'
  out[#out + 1] = row[2] or ''
end
return out
"""
)

# KEYS: clock, counter, channel, then the keys read, then the keys written. ARGV: how many are read, their revisions,
# then for each write '0' (delete) or '1', its value, the key of its index or '', and its name there; last what to
# publish.
COMMIT = (
    _CLOCK
    + """
local n = tonumber(ARGV[1])
local stale = {}
for i = 1, n do
  local rev = redis.call('HGET', KEYS[3 + i], 'r') or '0'
  if rev ~= ARGV[1 + i] then stale[#stale + 1] = i end
end
local out = {micros, #stale == 0 and '1' or '0'}
if #stale > 0 then
  for _, i in ipairs(stale) do
    local row = redis.call('HMGET', KEYS[3 + i], 'r', 'v')
    out[#out + 1] = tostring(i)
    out[#out + 1] = row[1] or '0'
    out[#out + 1] = row[2] or ''
  end
  return out
end
if #KEYS == 3 + n then return out end
redis.call('SET', KEYS[1], micros)
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('SET', KEYS[2], micros)  -- never again a revision that an emptied store gave out before
end
local at = 1 + n
for i = 4 + n, #KEYS do
  local op, value, index, name = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  at = at + 4
  if op == '1' then
    local rev = string.format('%.0f', redis.call('INCR', KEYS[2]))
    redis.call('HSET', KEYS[i], 'r', rev, 'v', value)
    if index ~= '' then redis.call('SADD', index, name) end
    out[#out + 1] = rev
  else
    redis.call('DEL', KEYS[i])
    if index ~= '' then redis.call('SREM', index, name) end
    out[#out + 1] = '0'
  end
end
if ARGV[at + 1] ~= '' then redis.call('PUBLISH', KEYS[3], ARGV[at + 1]) end
return out
"""
)
