// The inner learning rate over the whole training.
//
// Progress is a fraction of the samples of the whole job, not of a worker's own steps, so that a late joiner trains at
// the rate of all others.
#ifndef BMUF_WORKER_TRAINER_SCHEDULE_H_
#define BMUF_WORKER_TRAINER_SCHEDULE_H_

#include <string>

#include "absl/status/statusor.h"

namespace bmuf::worker {

enum class Schedule {
  kConstant,  // 1
  kLinear,    // 1 - p
  kCosine,    // (1 + cos(pi p)) / 2
};

// "constant", "linear" or "cosine"; INVALID_ARGUMENT names the choices.
absl::StatusOr<Schedule> ParseSchedule(const std::string& name);

// The factor of the learning rate at `progress`, which is clamped to [0, 1]. In [0, 1].
double LearningRateFactor(Schedule schedule, double progress);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_SCHEDULE_H_
