"""The arithmetic of PPO on a language model, and eight rooms around it."""
