"""Trainers of other libraries with forkpoint's steps, which compute each shared token once."""
