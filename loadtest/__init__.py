"""Load on a pair of servers, real or simulated: what sends it, serves it and measures it."""
