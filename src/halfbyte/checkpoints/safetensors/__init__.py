"""Safetensors files and folders: header, shards, reader and writers."""
