"""Nothing is proposed: plain steps, by the loop and the cache of this package."""
