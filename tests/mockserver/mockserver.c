/* mockserver: an OpenAI-compatible streaming server with known ground truth.
 *
 * One thread, epoll, every response pre-encoded once and shared by all connections, so that it costs
 * little more than the kernel's copy. Two modes:
 *   schedule  each event is written at a seeded time; the time of each write is logged (ground truth)
 *   flood     everything is written as fast as the socket takes it (--burst K: K events per write, round robin)
 *
 * Build: cc -O2 -Wall -Wextra -o mockserver mockserver.c
 * With TLS 1.3 (--tls-cert, --tls-key), by OpenSSL: cc -O2 -Wall -Wextra -DKV_TLS -o mockserver mockserver.c -lssl -lcrypto
 * When it listens it prints {"port": N}; --port 0 takes a free one. With --until-eof it stops when standard input closes,
 * so that it cannot outlive the process that started it.
 * Log (--log FILE, written on SIGTERM/SIGINT): one JSON object per request, times in ns of CLOCK_MONOTONIC
 * (the clock of Python's time.monotonic_ns and perf_counter_ns on Linux).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#ifdef KV_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

typedef uint64_t u64;

static struct {
    int port, tokens, k, flood, burst, role_first, finish_separate, prompt_tokens, until_eof;
    double ttft, tpot, jttft, jgap, role_at, usage_delay, stall_p, stall_ms;
    u64 seed;
    const char *log, *model, *tls_cert, *tls_key;
} cf = {.port = 8100, .k = 1, .prompt_tokens = 16, .ttft = 50, .tpot = 10, .seed = 1, .model = "mock"};

static const char *words[] = {" the", " of", " and", " to", " in", " is", " that", " for", " it", " as", " was",
    " with", " be", " by", " on", " not", " he", " his", " but", " at", " are", " this", " have", " from", " or",
    " had", " an", " they", " which", " one", " you", " were"};
#define NWORDS ((int)(sizeof words / sizeof *words))

static u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

/* ---- growable buffer ---- */
struct buf { char *p; size_t n, cap; };
static void need(struct buf *b, size_t more) {
    if (b->n + more + 1 <= b->cap) return;
    b->cap = (b->n + more + 1) * 2;
    b->p = realloc(b->p, b->cap);
    if (!b->p) { perror("realloc"); exit(1); }
}
static void putf(struct buf *b, const char *fmt, ...) {
    va_list ap, aq;
    va_start(ap, fmt);
    va_copy(aq, ap);
    int m = vsnprintf(NULL, 0, fmt, ap);
    need(b, (size_t)m);
    vsnprintf(b->p + b->n, (size_t)m + 1, fmt, aq);
    b->n += (size_t)m;
    va_end(ap);
    va_end(aq);
}

/* ---- pre-encoded responses ---- */
enum { EV_HDR, EV_ROLE, EV_TOK, EV_FIN, EV_END }; /* EV_END: usage chunk (if asked), [DONE], last HTTP chunk */
struct resp {
    int chat, ntok, usage, cont, stream;
    struct buf b;
    int nev, ntoken_ev;
    size_t *end;   /* end offset of event i */
    unsigned char *kind;
    int *toks;
    struct resp *next;
};
static struct resp *cache;

static void http_chunk(struct buf *b, const char *payload, size_t n) {
    putf(b, "%zx\r\n", n);
    need(b, n);
    memcpy(b->p + b->n, payload, n);
    b->n += n;
    putf(b, "\r\n");
}
static void add_ev(struct resp *r, int kind, int toks) {
    r->end = realloc(r->end, sizeof *r->end * (size_t)(r->nev + 1));
    r->kind = realloc(r->kind, (size_t)(r->nev + 1));
    r->toks = realloc(r->toks, sizeof *r->toks * (size_t)(r->nev + 1));
    r->end[r->nev] = r->b.n;
    r->kind[r->nev] = (unsigned char)kind;
    r->toks[r->nev++] = toks;
    if (kind == EV_TOK) r->ntoken_ev++;
}
static void usage_json(struct buf *e, int done) {
    putf(e, "{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":null}",
         cf.prompt_tokens, cf.prompt_tokens + done, done);
}
static struct resp *get_resp(int chat, int ntok, int usage, int cont, int stream) {
    for (struct resp *r = cache; r; r = r->next)
        if (r->chat == chat && r->ntok == ntok && r->usage == usage && r->cont == cont && r->stream == stream) return r;
    struct resp *r = calloc(1, sizeof *r);
    *r = (struct resp){.chat = chat, .ntok = ntok, .usage = usage, .cont = cont, .stream = stream, .next = cache};
    cache = r;
    const char *id = chat ? "chatcmpl-00000000000000000000000000000000" : "cmpl-00000000000000000000000000000000";
    struct buf e = {0};
    if (!stream) {
        struct buf t = {0};
        for (int i = 0; i < ntok; i++) putf(&t, "%s", words[i % NWORDS]);
        putf(&e, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"%s\",\"choices\":[{\"index\":0,", id,
             chat ? "chat.completion" : "text_completion", cf.model);
        putf(&e, chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"}," : "\"text\":\"%s\",", t.n ? t.p : "");
        putf(&e, "\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],\"usage\":");
        usage_json(&e, ntok);
        putf(&e, "}");
        putf(&r->b, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", e.n, e.p);
        add_ev(r, EV_END, ntok);
        free(t.p);
        free(e.p);
        return r;
    }
    putf(&r->b, "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 00:00:00 GMT\r\nserver: mock\r\n"
                "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
    add_ev(r, EV_HDR, 0);
#define HEAD(b) putf(b, "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"%s\",\"choices\":", id, \
                     chat ? "chat.completion.chunk" : "text_completion", cf.model)
#define FLUSH(what, toks_) do { http_chunk(&r->b, e.p, e.n); add_ev(r, what, toks_); e.n = 0; } while (0)
    if (chat && cf.role_first) {
        HEAD(&e);
        putf(&e, "[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]");
        if (cont) { putf(&e, ",\"usage\":"); usage_json(&e, 0); }
        putf(&e, "}\n\n");
        FLUSH(EV_ROLE, 0);
    }
    for (int i = 0; i < ntok; i += cf.k) {
        int m = ntok - i < cf.k ? ntok - i : cf.k;
        int last = i + m >= ntok && !cf.finish_separate;
        HEAD(&e);
        putf(&e, chat ? "[{\"index\":0,\"delta\":{\"content\":\"" : "[{\"index\":0,\"text\":\"");
        for (int j = 0; j < m; j++) putf(&e, "%s", words[(i + j) % NWORDS]);
        putf(&e, chat ? "\"},\"logprobs\":null,\"finish_reason\":%s" : "\",\"logprobs\":null,\"finish_reason\":%s",
             last ? "\"length\"" : "null");
        putf(&e, ",\"stop_reason\":null}]");
        if (cont) { putf(&e, ",\"usage\":"); usage_json(&e, i + m); }
        putf(&e, "}\n\n");
        FLUSH(EV_TOK, m);
    }
    if (cf.finish_separate) {
        HEAD(&e);
        putf(&e, chat ? "[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n"
                      : "[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n");
        FLUSH(EV_FIN, 0);
    }
    if (usage) {
        HEAD(&e);
        putf(&e, "[],\"usage\":");
        usage_json(&e, ntok);
        putf(&e, "}\n\n");
        http_chunk(&r->b, e.p, e.n);
        e.n = 0;
    }
    http_chunk(&r->b, "data: [DONE]\n\n", 14);
    putf(&r->b, "0\r\n\r\n");
    add_ev(r, EV_END, 0);
    free(e.p);
    return r;
}

/* ---- request records ---- */
struct rec {
    u64 t_accept, t_first, t_req, t_hdr, t_role, t_end, sched_ttft;
    int chat, ntok, nt, stream, conn, nreq_on_conn, aborted, streams_open;
    u64 *t;        /* write time of each token event */
    char xid[72];
};
static struct rec **recs;
static size_t nrec, caprec;
static int open_streams, max_open, nconn_total;
static u64 events_sent, writes, write_ns, max_write_ns;
static u64 prompt_tokens, generation_tokens, finished, aborted; /* the counters of /metrics */

struct conn {
    int fd, id, nreq, busy, close_after;
    int want_out;        /* who waits for room in the socket: WRITER, READER (TLS: a read may have to write first) */
    int write_wants_in;  /* TLS: a write may have to read first */
#ifdef KV_TLS
    SSL *ssl;
#endif
    struct buf in;
    u64 t_accept, t_first;
    struct resp *r;
    struct rec *rec;
    int ev;              /* events released so far */
    int prompt_counted;  /* whether its prompt is in the counter */
    size_t off, target;  /* bytes sent, bytes released */
    u64 due, rng, t_tok0;
    int hpos;            /* index in the timer heap, -1 if none */
    struct conn *rnext;  /* ready ring (flood with --burst) */
    int in_ring;
    struct conn *dead_next;
};

/* ---- timer heap ---- */
static struct conn **heap;
static int nheap, capheap;
static void hset(int i, struct conn *c) { heap[i] = c; c->hpos = i; }
static void hup(int i) {
    struct conn *c = heap[i];
    while (i && heap[(i - 1) / 2]->due > c->due) { hset(i, heap[(i - 1) / 2]); i = (i - 1) / 2; }
    hset(i, c);
}
static void hdown(int i) {
    struct conn *c = heap[i];
    for (;;) {
        int j = 2 * i + 1;
        if (j >= nheap) break;
        if (j + 1 < nheap && heap[j + 1]->due < heap[j]->due) j++;
        if (heap[j]->due >= c->due) break;
        hset(i, heap[j]);
        i = j;
    }
    hset(i, c);
}
static void hpush(struct conn *c) {
    if (nheap == capheap) heap = realloc(heap, sizeof *heap * (size_t)(capheap = capheap * 2 + 64));
    heap[nheap] = c;
    hup(nheap++);
}
static void hdel(struct conn *c) {
    int i = c->hpos;
    if (i < 0) return;
    c->hpos = -1;
    if (i == --nheap) return;
    hset(i, heap[nheap]);
    hup(i);
    hdown(heap[i]->hpos == i ? i : heap[i]->hpos);
}

static int ep, tfd, lfd;
static struct conn *ring_head, *ring_tail, *dead;
static volatile sig_atomic_t stop;
static void on_sig(int s) { (void)s; stop = 1; }

static double unif(u64 *s) { /* splitmix64 */
    u64 z = (*s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}
static u64 ms2ns(double ms) { return ms <= 0 ? 0 : (u64)(ms * 1e6); }

static void try_next_request(struct conn *c);

static void drop(struct conn *c) {
    if (c->rec) { c->rec->aborted = 1; c->rec->t_end = now_ns(); c->rec = NULL; open_streams--; aborted++; }
    if (c->fd < 0) return;
    hdel(c);
#ifdef KV_TLS
    SSL_free(c->ssl);
    c->ssl = NULL;
#endif
    close(c->fd);
    c->fd = -1;
    c->dead_next = dead; /* freed at the end of the loop's round: events and callers may still hold it */
    dead = c;
}
enum { WRITER = 1, READER = 2 };
static void want_out(struct conn *c, int who, int on) {
    int was = c->want_out;
    c->want_out = on ? was | who : was & ~who;
    if (!was == !c->want_out) return;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (c->want_out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

/* ---- plain or TLS: only these, on_accept and what closes know which ---- */
#ifdef KV_TLS
static SSL_CTX *tls;
static void tls_start(void) {
    tls = SSL_CTX_new(TLS_server_method());
    if (!tls || SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) != 1 || SSL_CTX_use_certificate_chain_file(tls, cf.tls_cert) != 1 ||
        SSL_CTX_use_PrivateKey_file(tls, cf.tls_key, SSL_FILETYPE_PEM) != 1 || SSL_CTX_check_private_key(tls) != 1) {
        fprintf(stderr, "mockserver: %s and %s: %s\n", cf.tls_cert, cf.tls_key, ERR_reason_error_string(ERR_peek_last_error()));
        exit(1);
    }
    /* as send: a call may write less than it was given, and may go on from another address */
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}
/* What SSL_read_ex or SSL_write_ex would have returned as recv or send. */
static ssize_t tls_result(struct conn *c, int ok, size_t m, int *wants_in, int *wants_out) {
    int e = ok ? SSL_ERROR_NONE : SSL_get_error(c->ssl, 0);
    *wants_in = e == SSL_ERROR_WANT_READ;
    *wants_out = e == SSL_ERROR_WANT_WRITE;
    if (ok) return (ssize_t)m;
    errno = *wants_in || *wants_out ? EAGAIN : ECONNRESET;
    return e == SSL_ERROR_ZERO_RETURN ? 0 : -1;
}
#endif
static ssize_t conn_read(struct conn *c, char *p, size_t n) {
#ifdef KV_TLS
    if (c->ssl) {
        size_t m = 0;
        int in, out;
        ERR_clear_error();
        int ok = SSL_read_ex(c->ssl, p, n, &m);
        ssize_t r = tls_result(c, ok, m, &in, &out);
        want_out(c, READER, out);
        return r;
    }
#endif
    return recv(c->fd, p, n, MSG_DONTWAIT);
}
static ssize_t conn_write(struct conn *c, const char *p, size_t n) {
#ifdef KV_TLS
    if (c->ssl) {
        size_t m = 0;
        int out;
        ERR_clear_error();
        int ok = SSL_write_ex(c->ssl, p, n, &m);
        ssize_t r = tls_result(c, ok, m, &c->write_wants_in, &out);
        return r ? r : -1; /* 0 would be tried again */
    }
#endif
    return send(c->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}
/* Whether more was read than has been handed out: epoll does not tell of that. */
static int conn_pending(struct conn *c) {
#ifdef KV_TLS
    return c->ssl && SSL_pending(c->ssl) > 0;
#else
    (void)c;
    return 0;
#endif
}

/* Sends up to target; returns -1 if the connection died, 1 if all is out, 0 if blocked. */
static int pump(struct conn *c) {
    while (c->off < c->target) {
        u64 a = cf.flood ? 0 : now_ns();
        ssize_t m = conn_write(c, c->r->b.p + c->off, c->target - c->off);
        if (m < 0) {
            if (errno == EAGAIN) { want_out(c, WRITER, !c->write_wants_in); return 0; }
            if (errno == EINTR) continue;
            drop(c);
            return -1;
        }
        writes++;
        if (a) { u64 d = now_ns() - a; write_ns += d; if (d > max_write_ns) max_write_ns = d; }
        c->off += (size_t)m;
    }
    want_out(c, WRITER, 0);
    return 1;
}
static int finish(struct conn *c) { /* response fully sent; -1 if closed */
    if (c->rec) { c->rec->t_end = now_ns(); c->rec = NULL; open_streams--; finished++; }
    c->busy = 0;
    if (c->close_after) {
#ifdef KV_TLS
        if (c->ssl) SSL_shutdown(c->ssl);
#endif
        shutdown(c->fd, SHUT_WR);
        drop(c);
        return -1;
    }
    return 0;
}
/* Lets the events up to `upto` go out and counts their tokens; the prompt counts with the first of them. */
static void release(struct conn *c, int upto) {
    struct resp *r = c->r;
    int *toks = r->toks;
    for (; c->ev < upto; c->ev++) {
        if (toks[c->ev] && !c->prompt_counted) { c->prompt_counted = 1; prompt_tokens += (u64)cf.prompt_tokens; }
        generation_tokens += (u64)toks[c->ev];
    }
    c->target = r->end[upto - 1];
}
/* Releases the next event of a scheduled stream, then sets the time of the one after. */
static void step(struct conn *c) {
    struct resp *r = c->r;
    int i = c->ev;
    release(c, i + 1);
    u64 t = now_ns();
    switch (r->kind[i]) {
    case EV_HDR: c->rec->t_hdr = t; break;
    case EV_ROLE: c->rec->t_role = t; break;
    case EV_TOK: c->rec->t[c->rec->nt++] = t; events_sent++; break;
    default: break;
    }
    int st = pump(c);
    if (st < 0) return;
    if (c->ev == r->nev) {
        if (st == 1) { if (!finish(c)) try_next_request(c); }
        return;
    }
    u64 t0 = c->rec->t_req;
    switch (r->kind[c->ev]) {
    case EV_ROLE: c->due = t0 + ms2ns(cf.role_at); break;
    case EV_TOK:
        if (!c->rec->nt) c->due = t0 + c->rec->sched_ttft;
        else {
            double g = cf.tpot * r->toks[c->ev] + cf.jgap * (2 * unif(&c->rng) - 1);
            if (cf.stall_p > 0 && unif(&c->rng) < cf.stall_p) g += cf.stall_ms;
            c->due += ms2ns(g);
        }
        break;
    case EV_END: if (r->stream) c->due += ms2ns(cf.usage_delay); break;
    default: break;
    }
    hpush(c);
}
static void reply(struct conn *c, int code, const char *ctype, const char *body) {
    struct buf b = {0};
    putf(&b, "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", code, code == 200 ? "OK" : "Not Found",
         ctype, strlen(body), body);
    ssize_t m = conn_write(c, b.p, b.n);
    (void)m;
    free(b.p);
}
static long find_int(const char *body, const char *key, long dflt) {
    const char *p = strstr(body, key);
    if (!p) return dflt;
    p += strlen(key);
    while (*p == ' ' || *p == ':' || *p == '"') p++;
    return (*p >= '0' && *p <= '9') ? strtol(p, NULL, 10) : dflt;
}
static int find_true(const char *body, const char *key) {
    const char *p = strstr(body, key);
    if (!p) return 0;
    p += strlen(key);
    while (*p == ' ' || *p == ':') p++;
    return !strncmp(p, "true", 4);
}
static void generate(struct conn *c, const char *body, int chat, const char *xid, u64 t_req) {
    long n = cf.tokens;
    if (n <= 0) n = find_int(body, "\"max_tokens\"", -1);
    if (n <= 0) n = find_int(body, "\"max_completion_tokens\"", 16);
    int stream = find_true(body, "\"stream\"");
    c->r = get_resp(chat, (int)n, find_true(body, "\"include_usage\""), find_true(body, "\"continuous_usage_stats\""), stream);
    struct rec *q = calloc(1, sizeof *q);
    if (nrec == caprec) recs = realloc(recs, sizeof *recs * (caprec = caprec * 2 + 1024));
    recs[nrec++] = q;
    q->t_accept = c->t_accept;
    q->t_first = c->t_first;
    q->t_req = t_req;
    q->chat = chat;
    q->ntok = (int)n;
    q->stream = stream;
    q->conn = c->id;
    q->nreq_on_conn = c->nreq++;
    snprintf(q->xid, sizeof q->xid, "%s", xid);
    q->streams_open = ++open_streams;
    if (open_streams > max_open) max_open = open_streams;
    c->rec = q;
    c->busy = 1;
    c->off = c->target = 0;
    c->ev = c->prompt_counted = 0;
    c->rng = cf.seed * 1000003ull + nrec;
    if (cf.flood) {
        events_sent += (u64)c->r->ntoken_ev;
        if (cf.burst && stream) {
            if (!c->in_ring) {
                c->in_ring = 1;
                c->rnext = NULL;
                if (ring_tail) ring_tail->rnext = c; else ring_head = c;
                ring_tail = c;
            }
            return;
        }
        release(c, c->r->nev);
        if (pump(c) == 1) finish(c); /* the caller goes on with pipelined input */
        return;
    }
    q->t = malloc(sizeof *q->t * (size_t)(c->r->ntoken_ev + 1));
    q->sched_ttft = ms2ns(cf.ttft + cf.jttft * (2 * unif(&c->rng) - 1));
    if (stream) { c->due = t_req; step(c); }
    else { c->due = t_req + q->sched_ttft + ms2ns(cf.tpot * (double)(n - 1)); hpush(c); }
}
static void metrics(struct conn *c) {
    struct buf b = {0};
#define METRIC(type, name, label, fmt, value) \
    putf(&b, "# TYPE vllm:" name " " type "\nvllm:" name "{model_name=\"%s\"" label "} " fmt "\n", cf.model, value)
    METRIC("gauge", "num_requests_running", "", "%d", open_streams);
    METRIC("gauge", "num_requests_waiting", "", "%d", 0);
    METRIC("gauge", "kv_cache_usage_perc", "", "%d", 0);
    METRIC("counter", "prompt_tokens_total", "", "%" PRIu64, prompt_tokens);
    METRIC("counter", "generation_tokens_total", "", "%" PRIu64, generation_tokens);
    METRIC("counter", "request_success_total", ",finished_reason=\"length\"", "%" PRIu64, finished);
    putf(&b, "vllm:request_success_total{model_name=\"%s\",finished_reason=\"abort\"} %" PRIu64 "\n", cf.model, aborted);
    reply(c, 200, "text/plain; version=0.0.4", b.p);
    free(b.p);
}

/* Handles one complete request in c->in, if there is one; returns 1 if handled, 0 if not, -1 if closed. */
static int one_request(struct conn *c) {
    if (c->busy || !c->in.n) return 0;
    c->in.p[c->in.n] = 0;
    char *he = strstr(c->in.p, "\r\n\r\n");
    if (!he) return 0;
    size_t hl = (size_t)(he - c->in.p) + 4, cl = 0;
    char xid[72] = "";
    int chunked = 0, closing = 0;
    for (char *l = strstr(c->in.p, "\r\n"); l && l < he; l = strstr(l + 2, "\r\n")) {
        char *h = l + 2;
        if (!strncasecmp(h, "content-length:", 15)) cl = strtoul(h + 15, NULL, 10);
        else if (!strncasecmp(h, "transfer-encoding: chunked", 26)) chunked = 1;
        else if (!strncasecmp(h, "connection: close", 17)) closing = 1;
        else if (!strncasecmp(h, "expect: 100", 11) && c->in.n == hl) {
            ssize_t m = conn_write(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
            (void)m;
        } else if (!strncasecmp(h, "x-request-id:", 13)) {
            char *v = h + 13;
            while (*v == ' ') v++;
            size_t m = strcspn(v, "\r\"\\");
            snprintf(xid, sizeof xid, "%.*s", (int)(m < 70 ? m : 70), v);
        }
    }
    size_t total = hl + cl;
    if (chunked) { /* good enough for a mock: wait for the last chunk, scan the raw bytes */
        char *z = strstr(he + 2, "\r\n0\r\n\r\n");
        if (!z) return 0;
        total = (size_t)(z - c->in.p) + 7;
    }
    if (c->in.n < total) return 0;
    u64 t = now_ns();
    char save = c->in.p[total];
    c->in.p[total] = 0;
    char *line = c->in.p, *body = c->in.p + hl;
    c->close_after = closing;
    int ok = 1;
    if (!strncmp(line, "POST /v1/completions", 20)) generate(c, body, 0, xid, t);
    else if (!strncmp(line, "POST /v1/chat/completions", 25)) generate(c, body, 1, xid, t);
    else if (strstr(line, " /v1/models") && strstr(line, " /v1/models") < he) {
        char m[512];
        snprintf(m, sizeof m, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"mock\","
                 "\"root\":\"%s\",\"parent\":null,\"max_model_len\":131072,\"permission\":[]}]}", cf.model, cf.model);
        reply(c, 200, "application/json", m);
    } else if (!strncmp(line, "GET /metrics", 12)) metrics(c);
    else if (!strncmp(line, "GET /health", 11) || !strncmp(line, "GET /ping", 9)) reply(c, 200, "application/json", "{}");
    else if (!strncmp(line, "GET /version", 12)) reply(c, 200, "application/json", "{\"version\":\"0.0.mock\"}");
    else if (!strncmp(line, "GET /__stats", 12)) {
        char m[256];
        snprintf(m, sizeof m, "{\"requests\":%zu,\"open\":%d,\"max_open\":%d,\"events\":%" PRIu64 "}", nrec, open_streams, max_open, events_sent);
        reply(c, 200, "application/json", m);
    } else if (!strncmp(line, "POST /tokenize", 14)) {
        int w = 1;
        for (char *p = body; *p; p++) w += *p == ' ';
        char m[128];
        snprintf(m, sizeof m, "{\"count\":%d,\"max_model_len\":131072,\"tokens\":[]}", w);
        reply(c, 200, "application/json", m);
    } else { reply(c, 404, "application/json", "{\"error\":\"not found\"}"); ok = 0; }
    (void)ok;
    if (c->fd < 0) return -1;
    c->in.p[total] = save;
    memmove(c->in.p, c->in.p + total, c->in.n - total);
    c->in.n -= total;
    c->t_first = t;
    if (!c->busy && closing) { drop(c); return -1; }
    return 1;
}
static void try_next_request(struct conn *c) { while (one_request(c) == 1) {} }

static void on_read(struct conn *c) {
    for (;;) {
        need(&c->in, 16384);
        ssize_t m = conn_read(c, c->in.p + c->in.n, c->in.cap - c->in.n - 1);
        if (m == 0) { drop(c); return; }
        if (m < 0) { if (errno == EAGAIN) break; if (errno == EINTR) continue; drop(c); return; }
        if (!c->in.n) c->t_first = now_ns();
        c->in.n += (size_t)m;
        if ((size_t)m < 16000 && !conn_pending(c)) break;
    }
    try_next_request(c);
}
static void on_accept(void) {
    for (;;) {
        int fd = accept4(lfd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->id = nconn_total++;
        c->hpos = -1;
        c->t_accept = now_ns();
#ifdef KV_TLS
        if (tls) {
            c->ssl = SSL_new(tls);
            if (!c->ssl || SSL_set_fd(c->ssl, fd) != 1) { fputs("mockserver: no memory for TLS\n", stderr); exit(1); }
            SSL_set_accept_state(c->ssl); /* the handshake goes on with each read */
        }
#endif
        need(&c->in, 4096);
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
    }
}
static void dump(void) {
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    fprintf(stderr, "{\"requests\":%zu,\"connections\":%d,\"max_open\":%d,\"events\":%" PRIu64 ",\"writes\":%" PRIu64
            ",\"mean_write_us\":%.2f,\"max_write_us\":%.1f,\"cpu_s\":%.3f}\n", nrec, nconn_total, max_open, events_sent, writes,
            writes ? (double)write_ns / 1e3 / (double)writes : 0.0, (double)max_write_ns / 1e3,
            (double)ru.ru_utime.tv_sec + (double)ru.ru_stime.tv_sec + 1e-6 * (double)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec));
    if (!cf.log) return;
    FILE *f = fopen(cf.log, "w");
    if (!f) { perror(cf.log); return; }
    for (size_t i = 0; i < nrec; i++) {
        struct rec *q = recs[i];
        fprintf(f, "{\"i\":%zu,\"xid\":\"%s\",\"conn\":%d,\"n_on_conn\":%d,\"chat\":%d,\"stream\":%d,\"n_tok\":%d,\"k\":%d,\"open\":%d,\"aborted\":%d,"
                "\"t_accept\":%" PRIu64 ",\"t_first\":%" PRIu64 ",\"t_req\":%" PRIu64 ",\"t_hdr\":%" PRIu64 ",\"t_role\":%" PRIu64
                ",\"t_end\":%" PRIu64 ",\"sched_ttft\":%" PRIu64 ",\"t\":[",
                i, q->xid, q->conn, q->nreq_on_conn, q->chat, q->stream, q->ntok, cf.k, q->streams_open, q->aborted, q->t_accept, q->t_first,
                q->t_req, q->t_hdr, q->t_role, q->t_end, q->sched_ttft);
        for (int j = 0; j < q->nt; j++) fprintf(f, j ? ",%" PRIu64 : "%" PRIu64, q->t[j]);
        fprintf(f, "]}\n");
    }
    fclose(f);
}
static void usage(void) {
    fputs("mockserver [--port 8100 (0: a free one)] [--mode schedule|flood] [--tokens N (0: the request's max_tokens)] [--k TOKENS_PER_CHUNK]\n"
          "  [--ttft MS] [--tpot MS] [--jitter-ttft MS] [--jitter-gap MS] [--stall-p P --stall-ms MS] [--seed S]\n"
          "  [--role-first --role-at MS] [--finish-separate] [--usage-delay MS] [--burst EVENTS_PER_WRITE (flood)]\n"
          "  [--prompt-tokens N] [--model NAME] [--log FILE] [--until-eof]\n"
          "  [--tls-cert FILE --tls-key FILE (PEM; built with -DKV_TLS)]\n", stderr);
    exit(2);
}
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (!strcmp(a, "--role-first")) { cf.role_first = 1; continue; }
        if (!strcmp(a, "--finish-separate")) { cf.finish_separate = 1; continue; }
        if (!strcmp(a, "--until-eof")) { cf.until_eof = 1; continue; }
        if (i + 1 >= argc) usage();
        const char *v = argv[++i];
        if (!strcmp(a, "--port")) cf.port = atoi(v);
        else if (!strcmp(a, "--mode")) cf.flood = !strcmp(v, "flood");
        else if (!strcmp(a, "--tokens")) cf.tokens = atoi(v);
        else if (!strcmp(a, "--k")) cf.k = atoi(v);
        else if (!strcmp(a, "--ttft")) cf.ttft = atof(v);
        else if (!strcmp(a, "--tpot")) cf.tpot = atof(v);
        else if (!strcmp(a, "--jitter-ttft")) cf.jttft = atof(v);
        else if (!strcmp(a, "--jitter-gap")) cf.jgap = atof(v);
        else if (!strcmp(a, "--stall-p")) cf.stall_p = atof(v);
        else if (!strcmp(a, "--stall-ms")) cf.stall_ms = atof(v);
        else if (!strcmp(a, "--seed")) cf.seed = strtoull(v, NULL, 10);
        else if (!strcmp(a, "--role-at")) cf.role_at = atof(v);
        else if (!strcmp(a, "--usage-delay")) cf.usage_delay = atof(v);
        else if (!strcmp(a, "--burst")) cf.burst = atoi(v);
        else if (!strcmp(a, "--prompt-tokens")) cf.prompt_tokens = atoi(v);
        else if (!strcmp(a, "--model")) cf.model = v;
        else if (!strcmp(a, "--log")) cf.log = v;
        else if (!strcmp(a, "--tls-cert")) cf.tls_cert = v;
        else if (!strcmp(a, "--tls-key")) cf.tls_key = v;
        else usage();
    }
    if (!cf.tls_cert != !cf.tls_key) { fputs("mockserver: --tls-cert and --tls-key go together\n", stderr); return 2; }
    if (cf.tls_cert) {
#ifdef KV_TLS
        tls_start();
#else
        fputs("mockserver: this one was built without TLS (see the head of mockserver.c)\n", stderr);
        return 2;
#endif
    }
    if (cf.k < 1) cf.k = 1;
    struct sigaction sa = {.sa_handler = on_sig};
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGINT, &sa, NULL);
    signal(SIGPIPE, SIG_IGN);
    lfd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int one = 1;
    setsockopt(lfd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in ad = {.sin_family = AF_INET, .sin_port = htons((uint16_t)cf.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(lfd, (struct sockaddr *)&ad, sizeof ad) || listen(lfd, 4096)) { perror("bind/listen"); return 1; }
    socklen_t adlen = sizeof ad;
    getsockname(lfd, (struct sockaddr *)&ad, &adlen);
    printf("{\"port\": %d}\n", ntohs(ad.sin_port));
    fflush(stdout);
    ep = epoll_create1(EPOLL_CLOEXEC);
    tfd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &lfd};
    epoll_ctl(ep, EPOLL_CTL_ADD, lfd, &e);
    e.data.ptr = &tfd;
    epoll_ctl(ep, EPOLL_CTL_ADD, tfd, &e);
    e.data.ptr = &cf; /* standard input: nothing is said there, only its end counts */
    if (cf.until_eof) epoll_ctl(ep, EPOLL_CTL_ADD, STDIN_FILENO, &e);
    u64 armed = 0;
    struct epoll_event evs[1024];
    while (!stop) {
        u64 t = now_ns();
        while (nheap && heap[0]->due <= t) { struct conn *c = heap[0]; hdel(c); step(c); }
        if (nheap && heap[0]->due != armed) {
            armed = heap[0]->due;
            struct itimerspec it = {.it_value = {(time_t)(armed / 1000000000ull), (long)(armed % 1000000000ull)}};
            timerfd_settime(tfd, TFD_TIMER_ABSTIME, &it, NULL);
        }
        int n = epoll_wait(ep, evs, 1024, ring_head ? 0 : -1);
        for (int i = 0; i < n; i++) {
            if (evs[i].data.ptr == &lfd) { on_accept(); continue; }
            if (evs[i].data.ptr == &tfd) { u64 x; ssize_t m = read(tfd, &x, 8); (void)m; armed = 0; continue; }
            if (evs[i].data.ptr == &cf) { char x[64]; if (read(STDIN_FILENO, x, sizeof x) <= 0) stop = 1; continue; }
            struct conn *c = evs[i].data.ptr;
            if (c->fd < 0) continue;
            if (((evs[i].events & EPOLLOUT) || c->write_wants_in) && c->busy && !(cf.flood && cf.burst && c->r->stream)) {
                int st = pump(c);
                if (st < 0) continue;
                if (st == 1 && c->ev == c->r->nev && c->hpos < 0 && c->off == c->r->b.n) {
                    if (finish(c)) continue;
                    try_next_request(c);
                    continue;
                }
            }
            if ((evs[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) || (c->want_out & READER)) on_read(c);
        }
        /* flood with --burst: one pass over the ring, K events per connection */
        struct conn *c = ring_head;
        ring_head = ring_tail = NULL;
        while (c) {
            struct conn *nx = c->rnext;
            c->in_ring = 0;
            c->rnext = NULL;
            if (c->fd < 0) { c = nx; continue; }
            if (c->off == c->target) {
                int upto = c->ev + cf.burst;
                release(c, upto < c->r->nev ? upto : c->r->nev);
            }
            int st = pump(c);
            if (st >= 0 && st == 1 && c->off == c->r->b.n) {
                if (!finish(c)) try_next_request(c); /* may put c back into the ring */
            } else if (st >= 0 && !c->in_ring) {
                c->in_ring = 1;
                if (ring_tail) ring_tail->rnext = c; else ring_head = c;
                ring_tail = c;
            }
            c = nx;
        }
        while (dead) { struct conn *nx = dead->dead_next; free(dead->in.p); free(dead); dead = nx; }
    }
    dump();
    return 0;
}
