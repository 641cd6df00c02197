"""Helpers of the tests: emulators, writers of small files, references."""
