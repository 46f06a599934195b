"""Advantages, policy losses, KL estimators and loss weights: pure functions of arrays."""
