from memfit.cli import main

main()
