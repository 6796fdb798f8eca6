/* The C interface of shardlab: does a layout fit, and which layout is best. Library: libshardlab_c.
 *
 *   shardlab_answer* answer = shardlab_memory("{\"model\": \"llama-3.1-70b\", \"machine\": \"h100\", \"devices\": 64, \"tp\": 8}");
 *   if (shardlab_status(answer) == SHARDLAB_YES) puts(shardlab_json(answer));
 *   shardlab_free(answer);
 *
 * A question is a JSON object whose keys are the flags of `shardlab memory` and `shardlab search` with underscores. A value is a number,
 * true, false or a text as the flag takes it ("8Ki", "1T"); a list is the values of an axis; {"optimizer": "cpu"} is an offload. A key
 * with a dot ("model.layers") is any other key of a sweep file.
 *
 * Nothing is thrown. An answer is never null, and is freed once. Questions may be asked from several threads at a time. A bug of
 * shardlab's that it finds in itself ends the process with a message on stderr.
 */
#ifndef SHARDLAB_H
#define SHARDLAB_H

#if defined(__GNUC__)
#define SHARDLAB_API __attribute__((visibility("default")))
#else
#define SHARDLAB_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Values of shardlab_status, which are the program's exit codes. */
enum {
  SHARDLAB_YES = 0,        /* it fits; a layout was found */
  SHARDLAB_BUG = 1,        /* a bug of shardlab's */
  SHARDLAB_REFUSED = 2,    /* the question is no question, or cannot be answered */
  SHARDLAB_NO = 3,         /* it does not fit; no layout does */
  SHARDLAB_ENVIRONMENT = 6 /* a file that cannot be read, memory that is not there */
};

typedef struct shardlab_answer shardlab_answer;

/* "0.1.0". Lives as long as the library. */
SHARDLAB_API const char* shardlab_version(void);

/* Bytes of each pipeline stage and whether they fit: the object of `shardlab memory --format json`.
 * Keys beside layout and training: model, machine (both needed), devices, profile, machine_file, assume, tokens, price, plan,
 * device_mtbf, checkpoint_time, restart_time, checkpoint_every (times with their unit: "50000h"). */
SHARDLAB_API shardlab_answer* shardlab_memory(const char* question);

/* The best layouts: the object of `shardlab search --format json`.
 * Keys beside axes: model, machine, devices, global_batch_tokens (all needed), seq_len, profile, machine_file, assume, objective, top,
 * lora_rank, lora_targets, frozen, frozen_bits, tokens, price, max_days, margin, site_overhead, kg_co2_per_kwh. */
SHARDLAB_API shardlab_answer* shardlab_search(const char* question);

/* {"models": [...], "machines": [...], "profiles": [...]}: the names that questions may use. */
SHARDLAB_API shardlab_answer* shardlab_names(void);

SHARDLAB_API int shardlab_status(const shardlab_answer* answer);

/* UTF-8. Of SHARDLAB_YES and SHARDLAB_NO the object that was asked for, else {"error": ..., "hint": ...}. Lives as long as the answer. */
SHARDLAB_API const char* shardlab_json(const shardlab_answer* answer);

/* Null is allowed. */
SHARDLAB_API void shardlab_free(shardlab_answer* answer);

#ifdef __cplusplus
}
#endif

#endif
