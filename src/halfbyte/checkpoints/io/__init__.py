"""Files on disk: bounded JSON, regular files, resumable and flushed writing."""
