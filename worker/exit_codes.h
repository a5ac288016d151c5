// How bmuf-worker ends (numbers of sysexits.h where one fits).
#ifndef BMUF_WORKER_EXIT_CODES_H_
#define BMUF_WORKER_EXIT_CODES_H_

namespace bmuf::worker {

inline constexpr int kExitDone = 0;            // Job finished, or stopped by a signal after the block at hand.
inline constexpr int kExitUsage = 64;          // The command line.
inline constexpr int kExitData = 66;           // The data set is missing or damaged, or the model does not fit it.
inline constexpr int kExitRefused = 69;        // The coordinator refused for good, or the job failed.
inline constexpr int kExitInternal = 70;       // A fault of this program or of the framework, and a diverged training.
inline constexpr int kExitDeviceMissing = 71;  // A device that was asked for is not there.
inline constexpr int kExitUnreachable = 75;    // The coordinator did not answer for too long; another try may help.

inline constexpr char kExitCodesText[] =
    "Exit codes: 0 done, or stopped by SIGTERM or SIGINT after the block at hand; 64 usage; 66 data set or model file "
    "missing or bad; 69 refused by the coordinator, or the job failed; 70 internal; 71 a device is not there; 75 the "
    "coordinator cannot be reached.";

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_EXIT_CODES_H_
