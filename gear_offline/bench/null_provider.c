/* A provider of verbs that does nothing but write one 64-byte queue entry a request, as network
 * cards' libraries do.  It stands in for a device when the cost of building and posting is measured.
 *
 * Only the first members of the structures are used; their layout is part of the verbs ABI. */
#include <stdint.h>
#include <string.h>

struct sge { uint64_t addr; uint32_t length, lkey; };

struct send_wr {
  uint64_t wr_id;
  struct send_wr *next;
  struct sge *sg_list;
  int num_sge;
  uint32_t opcode, send_flags, imm;
  uint64_t remote_addr;
  uint32_t rkey;
};

struct entry {                         /* as of a queue in a card's memory */
  uint64_t wr_id, remote_addr, addr;
  uint32_t rkey, lkey, length, opcode, send_flags, pad[3];
};

enum { ENTRIES = 4096, POST_SEND = 208, QP_NUMBER = 52, NUMBER = 0x7a11 };

static struct entry queue[ENTRIES] __attribute__((aligned(64)));
static uint64_t posted;
static char context[4096], qp[4096];

int null_post_send(void *pair, struct send_wr *wr, struct send_wr **bad) {
  (void)pair;
  (void)bad;
  for (; wr; wr = wr->next, posted++) {
    struct entry *e = &queue[posted % ENTRIES];
    e->wr_id = wr->wr_id;
    e->remote_addr = wr->remote_addr;
    e->rkey = wr->rkey;
    e->opcode = wr->opcode;
    e->send_flags = wr->send_flags;
    e->addr = wr->sg_list->addr;
    e->length = wr->sg_list->length;
    e->lkey = wr->sg_list->lkey;
  }
  return 0;
}

/* The head of an ibv_qp whose context leads to the function above. */
void *null_qp(void) {
  int (*function)(void *, struct send_wr *, struct send_wr **) = null_post_send;
  void *pointer = context;
  uint32_t number = NUMBER;
  memcpy(context + POST_SEND, &function, sizeof function);
  memcpy(qp, &pointer, sizeof pointer);
  memcpy(qp + QP_NUMBER, &number, sizeof number);
  return qp;
}

void *null_queue(void) { return queue; }

uint64_t null_posted(void) { return posted; }

void null_reset(void) { posted = 0; }
