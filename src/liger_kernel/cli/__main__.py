from liger_kernel.cli import main

main()
