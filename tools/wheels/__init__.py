"""Makes the wheels, and tries them where there is no compiler."""
