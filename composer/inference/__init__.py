"""The engine: paged cache, continuous batching, sampling."""
