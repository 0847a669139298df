// Forced into the Verilated runtime: its text goes to the world it belongs to, its $stop does not end the process.
#pragma once
#define VL_USER_STOP
#define VL_USER_FATAL
extern int rnic_vl_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
#define VL_PRINTF rnic_vl_printf
