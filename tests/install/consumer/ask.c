/* Another project's program in C: prints the answer, ends with its status. */
#include <shardlab.h>
#include <stdio.h>

int main(int argc, char** argv) {
  shardlab_answer* answer = shardlab_memory(argc > 1 ? argv[1] : NULL);
  const int status = shardlab_status(answer);
  puts(shardlab_json(answer));
  shardlab_free(answer);
  shardlab_free(NULL);
  return status;
}
