"""Other people's methods, at the settings of their papers, to compare Laplace approximations with."""
