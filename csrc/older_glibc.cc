// What the headers of a newer glibc count on and an older one lacks.

// libstdc++ leaves out atomic instructions while this is true. glibc has it since 2.32; false is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
