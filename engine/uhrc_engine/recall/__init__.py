"""A synthetic recall task and the tiny hybrid trained on it: does a cached prefix still know?"""
